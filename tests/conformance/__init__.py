"""Conformance: torch's own operator and module database, run on sharded tensors.

Every OpInfo and ModuleInfo that torch tests itself with is called twice: on plain tensors in one process (the truth),
and on tensors sharded over 2 and 3 ranks.  The outcome of a case is one word (see ``judge.Outcome``).

    python -m tests.conformance                     # everything, resumable; writes docs/op_table.md
    python -m tests.conformance --op softmax --ranks 2
    python -m tests.conformance --target dtensor    # the same cases on torch's DTensor, to compare
"""
