"""Messages that are left in memory for the ranks of one machine: the same results, and places that are used again."""

import gc
import inspect
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dpzoo.shard import collectives as comm
from dpzoo.shard import one_machine
from dpzoo.shard.outbox import FRONT, Inbox, Outbox, outbox
from dpzoo.shard.process_groups import group_of
from dpzoo.testing import distributed, domain_mesh
from dpzoo.testing.decorator import RANK_BODY
from tests.shard import test_collectives as collectives

pytestmark = pytest.mark.skipif(outbox() is None, reason="no memory without a name, or a processor other than x86")
CPU = torch.device("cpu")
TESTS = {name: getattr(test, RANK_BODY) for name, test in vars(collectives).items() if hasattr(test, RANK_BODY)}
OF_MESHES = [name for name, body in TESTS.items() if list(inspect.signature(body).parameters) == ["mesh"]]


@contextmanager
def by_socket(pg):
    before, one_machine._MAIL[pg] = one_machine._MAIL.get(pg), None
    try:
        yield
    finally:
        one_machine._MAIL[pg] = before


@pytest.mark.parametrize("mesh", list(collectives.MESHES))
@pytest.mark.parametrize("name", OF_MESHES)
@distributed(ranks=4)
def test_what_holds_for_memory_holds_for_sockets(name, mesh):
    pg = collectives.MESHES[mesh]().get_group()
    assert one_machine.mail_of(pg, CPU) is not None
    with by_socket(pg):
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
    for dtype in (torch.float16, torch.bfloat16, torch.complex128, torch.int64, torch.uint8, torch.bool):
        whole = [rows(30, 7 * r, dtype).view(5, 6).t() for r in range(ranks)]
        if dtype.is_complex:
            whole = [t.conj() for t in whole]
        parts = start(group, whole[me], [30] * ranks, whole[me]).wait()
        for r in (r for r in range(ranks) if r != me):
            assert torch.equal(parts[r].view(6, 5), whole[r].contiguous())


@distributed(ranks=3)
def test_some_ranks_send_nothing():
    group = domain_mesh().get_group().group_name
    me = group_of(group).rank()
    sizes = [[0, 5, 40], [300, 0, 0], [0, 0, 0]]  # from -> to
    sends = [[rows(n, 10 * me + r)] if n else [] for r, n in enumerate(sizes[me])]
    lengths = [sizes[r][me] for r in range(3)]
    parts = comm.start_transport(sends, lengths, torch.empty(0), group).wait()
    for r, n in enumerate(lengths):
        assert torch.equal(parts[r], rows(n, 10 * r + me))


@distributed(ranks=2)
def test_places_are_free_when_what_arrived_is_gone():
    group = domain_mesh().get_group().group_name
    me, n = group_of(group).rank(), 100_000
    kept = start(group, rows(n, me), [n, n], torch.empty(0)).wait()[1 - me]
    ends = []
    for step in range(6):
        assert torch.equal(start(group, rows(n, step), [n, n], torch.empty(0)).wait()[1 - me], rows(n, step))
        gc.collect()
        ends.append(outbox()._end)
    assert ends[1:] == ends[1:2] * 5  # two places serve all: the other rank may be a step behind
    assert torch.equal(kept, rows(n, 1 - me))  # and nobody wrote over what is still in use
    kept += 1  # which is this rank's own
    assert torch.equal(kept, rows(n, 2 - me))


@distributed(ranks=2)
def test_messages_are_waited_for_in_any_order():
    group = domain_mesh().get_group().group_name
    me, n = group_of(group).rank(), 1000
    pending = [start(group, rows(n, 10 * step + me), [n, n], torch.empty(0)) for step in range(3)]
    for step in (2, 0, 1):
        for _ in range(2):  # the second time it is there
            assert torch.equal(pending[step].wait()[1 - me], rows(n, 10 * step + 1 - me))


@pytest.mark.parametrize("lacks", ["outbox", "_inbox"])
@distributed(ranks=3)
def test_sockets_where_a_rank_cannot_read_or_be_read(lacks):
    """Then all ranks of the group know."""
    pg = domain_mesh().get_group()
    before, real = one_machine._MAIL.pop(pg, None), getattr(one_machine, lacks)
    try:
        if pg.rank() == 1:
            setattr(one_machine, lacks, lambda *_: None)
        assert one_machine.mail_of(pg, CPU) is None
        found = start(pg.group_name, rows(9, pg.rank()), [9] * 3, torch.empty(0)).wait()
        assert torch.equal(found[(pg.rank() + 1) % 3], rows(9, (pg.rank() + 1) % 3))
    finally:
        setattr(one_machine, lacks, real)
        one_machine._MAIL[pg] = before


@contextmanager
def timeout_of(mail, seconds):
    before, mail.timeout = mail.timeout, seconds
    try:
        yield
    finally:
        mail.timeout = before


@distributed(ranks=2)
def test_a_message_that_does_not_come():
    pg = domain_mesh().get_group()
    mail = one_machine.mail_of(pg, CPU)
    number = mail.next_number()
    with timeout_of(mail, 0.2), pytest.raises(dist.DistBackendError, match=r"of rank \d .* nothing came within 0 s"):
        mail.receive(1 - pg.rank(), number, 4)
    found = start(pg.group_name, rows(9, pg.rank()), [9, 9], torch.empty(0)).wait()[1 - pg.rank()]
    assert torch.equal(found, rows(9, 1 - pg.rank()))


@distributed(ranks=2)
def test_a_rank_that_receives_nothing():
    pg = domain_mesh().get_group()
    mail, other, me = one_machine.mail_of(pg, CPU), 1 - pg.rank(), pg.rank()
    first, count = mail._count, one_machine.SLOTS
    if me == 0:  # runs ahead
        for _ in range(count):
            mail.post(other, number := mail.next_number(), [rows(1, number)])
        with timeout_of(mail, 0.1), pytest.raises(dist.DistBackendError, match="1024 are under way"):
            mail.post(other, mail.next_number(), [rows(1, 0)])
    dist.barrier(pg)
    if me == 1:
        for _ in range(count):
            number = mail.next_number()
            assert mail.receive(other, number, 4).view(torch.float32).item() == number
        mail.next_number()
    assert mail._count == first + count + 1


@distributed(ranks=2)
def test_messages_that_nobody_waits_for():
    """After an error, say, that keeps them alive: they are lost when their slots are needed again."""
    pg = domain_mesh().get_group()
    mail, n, kept, ends = one_machine.mail_of(pg, CPU), 1000, [], []
    with timeout_of(mail, 5):
        for step in range(2 * one_machine.SLOTS + 100):
            kept.append(start(pg.group_name, rows(n, step), [n, n], torch.empty(0)))
            if step % 100 == 0:
                dist.barrier(pg)
                ends.append(outbox()._end)
        found = start(pg.group_name, rows(n, pg.rank()), [n, n], torch.empty(0)).wait()[1 - pg.rank()]
    assert torch.equal(found, rows(n, 1 - pg.rank()))
    assert ends[-1] == ends[12]  # places for as many as there are slots, and no more
    with pytest.raises(dist.DistBackendError, match="is lost: 1024 others have come since"):
        kept[5].wait()
    assert torch.equal(kept[-1].wait()[1 - pg.rank()], rows(n, len(kept) - 1))


@distributed(ranks=2)
def test_two_threads_wait_for_one_rank():
    groups = [dist.new_group(timeout=timedelta(seconds=10)) for _ in range(2)]
    me = dist.get_rank()

    def many(group):
        for step in range(200):
            time.sleep(0.001 * (step % 3 == me))
            found = start(group.group_name, rows(9, step + me), [9, 9], torch.empty(0)).wait()[1 - me]
            assert torch.equal(found, rows(9, step + 1 - me))
        return True

    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(many, groups)) == [True, True]
    finally:
        for group in groups:
            dist.destroy_process_group(group)


CHILD = """
import os, sys, torch
from dpzoo.shard.outbox import outbox
box = outbox()
line = box.reserve(100) // 8
box.words[line + 1] = box.put([torch.arange(5), torch.arange(3)])
box.words[line] = 1
print(os.getpid(), box.fd, box.token, line, flush=True)
sys.stdin.readline()
"""


def test_what_a_process_sent_outlives_it():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pid, fd, token, line = map(int, child.stdout.readline().split())
        with pytest.raises(OSError, match="not an outbox"):
            Inbox(pid, fd, token + 1)
        mail = one_machine.Mail(1, outbox(), (Inbox(pid, fd, token), None), (0, 0), (line, 0), 60, (0, 0))
        assert not mail.of[0].has_ended()
    finally:
        child.communicate("go\n")
    with pytest.raises(OSError):
        Inbox(pid, fd, token)
    assert mail.receive(0, 0, 8 * 8).view(torch.int64).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    with pytest.raises(dist.DistBackendError, match=f"of rank 0 of this group: its process, {pid}, has ended"):
        mail.receive(0, 1, 8)


def test_an_outbox_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        box = Outbox()
        box.put([torch.ones(3)])
    at = box.put([torch.ones(3, requires_grad=True)])
    assert Inbox(os.getpid(), box.fd, box.token).letter(at, 12).view(torch.float32).tolist() == [1, 1, 1]


def test_more_than_the_machine_holds():
    box = Outbox()
    box._end = len(box._map) - FRONT
    with pytest.raises(MemoryError, match="GiB are under way"):
        box.put([torch.zeros(1)])


def test_no_shared_memory_if_it_is_not_wanted(monkeypatch):
    monkeypatch.setenv("DPZOO_SHARED_MEMORY", "0")
    assert outbox.__globals__["_outbox"].__wrapped__(0) is None
