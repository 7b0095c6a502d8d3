"""Messages that are left in memory for the ranks of one machine: the same results, and places that are used again."""

import gc
import inspect
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from dpzoo.shard import collectives as comm
from dpzoo.shard import one_machine
from dpzoo.shard.outbox import FRONT, Inbox, Outbox, outbox
from dpzoo.shard.process_groups import group_of
from dpzoo.testing import distributed, domain_mesh
from dpzoo.testing.decorator import RANK_BODY
from tests.shard import test_collectives as by_socket

pytestmark = pytest.mark.skipif(outbox() is None, reason="no memory without a name, or a processor other than x86")
CPU = torch.device("cpu")
TESTS = {name: getattr(test, RANK_BODY) for name, test in vars(by_socket).items() if hasattr(test, RANK_BODY)}
OF_MESHES = [name for name, body in TESTS.items() if list(inspect.signature(body).parameters) == ["mesh"]]


@contextmanager
def memory_from(nbytes):
    before, one_machine.LARGE = one_machine.LARGE, nbytes
    try:
        yield
    finally:
        one_machine.LARGE = before


@pytest.mark.parametrize("mesh", list(by_socket.MESHES))
@pytest.mark.parametrize("name", OF_MESHES)
@distributed(ranks=4)
def test_what_holds_for_sockets_holds_for_memory(name, mesh):
    for nbytes in (1, 100):  # all of it, and some of it
        with memory_from(nbytes):
            TESTS[name](mesh)


def rows(n, start, dtype=torch.float32):
    return (torch.arange(n) + start).to(dtype)


def start(group, mine, lengths, like):
    """Send `mine` to each other rank."""
    me = group_of(group).rank()
    sends = [[] if r == me else [mine] for r in range(len(lengths))]
    return comm.start_transport(sends, [0 if r == me else n for r, n in enumerate(lengths)], like, group)


@distributed(ranks=[2, 3])
def test_every_dtype_and_any_strides(ranks):
    group = domain_mesh().get_group().group_name
    me = group_of(group).rank()
    with memory_from(1):
        for dtype in (torch.float16, torch.bfloat16, torch.complex128, torch.int64, torch.uint8, torch.bool):
            whole = [rows(30, 7 * r, dtype).view(5, 6).t() for r in range(ranks)]
            if dtype.is_complex:
                whole = [t.conj() for t in whole]
            parts = start(group, whole[me], [30] * ranks, whole[me]).wait()
            for r in (r for r in range(ranks) if r != me):
                assert torch.equal(parts[r].view(6, 5), whole[r].contiguous())


@distributed(ranks=3)
def test_large_and_small_messages_of_one_exchange():
    """Each pair of ranks decides by the size that both know; a rank that sends nothing takes part."""
    group = domain_mesh().get_group().group_name
    me = group_of(group).rank()
    sizes = [[0, 5, 40], [300, 0, 1], [0, 0, 0]]  # from -> to, in complex128
    with memory_from(400):
        sends = [[rows(n, 10 * me + r, torch.complex128)] if n else [] for r, n in enumerate(sizes[me])]
        lengths = [sizes[r][me] for r in range(3)]
        parts = comm.start_transport(sends, lengths, torch.empty(0, dtype=torch.complex128), group).wait()
    for r, n in enumerate(lengths):
        assert torch.equal(parts[r], rows(n, 10 * r + me, torch.complex128))


@distributed(ranks=2)
def test_places_are_free_when_what_arrived_is_gone():
    group = domain_mesh().get_group().group_name
    me = group_of(group).rank()
    n = 2 * one_machine.LARGE
    kept = start(group, rows(n, me), [n, n], torch.empty(0)).wait()[1 - me]
    ends = []
    for step in range(6):
        assert torch.equal(start(group, rows(n, step), [n, n], torch.empty(0)).wait()[1 - me], rows(n, step))
        gc.collect()
        ends.append(one_machine.mail_of(group_of(group), CPU).own._end)
    assert ends[1:] == ends[1:2] * 5  # two places serve all: the other rank may be a step behind
    assert torch.equal(kept, rows(n, 1 - me))  # and nobody wrote over what is still in use
    kept += 1  # which is this rank's own
    assert torch.equal(kept, rows(n, 2 - me))


@distributed(ranks=2)
def test_messages_are_waited_for_in_any_order():
    group = domain_mesh().get_group().group_name
    me = group_of(group).rank()
    n = 2 * one_machine.LARGE
    pending = [start(group, rows(n, 10 * step + me), [n, n], torch.empty(0)) for step in range(3)]
    for step in (2, 0, 1):
        for _ in range(2):  # the second time it is there
            assert torch.equal(pending[step].wait()[1 - me], rows(n, 10 * step + 1 - me))


@distributed(ranks=2)
def test_one_way_by_memory_and_the_other_by_socket():
    """Where a rank may not look at the other's memory, both know."""
    group = domain_mesh().get_group().group_name
    pg = group_of(group)
    me, n = pg.rank(), 2 * one_machine.LARGE
    before, find = one_machine._MAIL.pop(pg, None), one_machine._inbox
    try:
        if me == 1:
            one_machine._inbox = lambda *_: None
        mail = one_machine.mail_of(pg, CPU)
        assert [mail.receives(1 - me, n), mail.sends(1 - me, n)] == [me == 0, me == 1]
        assert torch.equal(start(group, rows(n, me), [n, n], torch.empty(0)).wait()[1 - me], rows(n, 1 - me))
    finally:
        one_machine._inbox, one_machine._MAIL[pg] = find, before


@distributed(ranks=2)
def test_a_rank_without_an_outbox_reads_those_of_others():
    pg = domain_mesh().get_group()
    before, own = one_machine._MAIL.pop(pg, None), one_machine.outbox
    try:
        if pg.rank() == 1:
            one_machine.outbox = lambda: None
        assert (one_machine.mail_of(pg, CPU).own is None) == (pg.rank() == 1)
        n = 2 * one_machine.LARGE
        found = start(pg.group_name, rows(n, pg.rank()), [n, n], torch.empty(0)).wait()
        assert torch.equal(found[1 - pg.rank()], rows(n, 1 - pg.rank()))
    finally:
        one_machine.outbox, one_machine._MAIL[pg] = own, before


CHILD = """
import os, sys, torch
from dpzoo.shard.outbox import outbox
box = outbox()
print(os.getpid(), box.fd, box.token, box.put([torch.arange(5), torch.arange(3)]), flush=True)
sys.stdin.readline()
"""


def test_a_message_outlives_the_process_that_sent_it():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pid, fd, token, at = map(int, child.stdout.readline().split())
        with pytest.raises(OSError, match="not an outbox"):
            Inbox(pid, fd, token + 1)
        box = Inbox(pid, fd, token)
    finally:
        child.communicate("go\n")
    with pytest.raises(OSError):
        Inbox(pid, fd, token)
    letter = box.letter(at, 8 * 8)
    assert letter.view(torch.int64).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_an_outbox_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        box = Outbox()
        box.put([torch.ones(3)])
    at = box.put([torch.ones(3, requires_grad=True)])
    assert Inbox(os.getpid(), box.fd, box.token).letter(at, 12).view(torch.float32).tolist() == [1, 1, 1]


def test_more_than_the_machine_holds():
    box = Outbox()
    box._end = len(box._memory) - FRONT
    with pytest.raises(MemoryError, match="GiB are under way"):
        box.put([torch.zeros(1)])


def test_no_shared_memory_if_it_is_not_wanted(monkeypatch):
    monkeypatch.setenv("DPZOO_SHARED_MEMORY", "0")
    assert outbox.__globals__["_outbox"].__wrapped__(0) is None
