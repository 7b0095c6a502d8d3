"""The `dpzoo` command: parse, call, print."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpzoo", description="Models that run domain-parallel, unchanged.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    demo = commands.add_parser("demo", help="train a ViT on real ERA5 fields, on 1 process and on 2 ranks, and compare")
    demo.add_argument("--ranks", type=int, default=2, help="ranks of the domain-parallel run (default: %(default)s)")
    demo.add_argument("--epochs", type=int, default=None, help="epochs of each run (default: the demo's own, a minute)")
    demo.add_argument(
        "--out", type=Path, default=Path("outputs/demo"), help="folder of the figure (default: %(default)s)"
    )
    demo.add_argument("--precision", choices=("float32", "float64"), default="float32", help="default: %(default)s")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser("doctor", help="check packages, devices and communication; say how to mend what fails")
    doctor.set_defaults(run=_doctor)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from dpzoo.demo.run import run_demo

    return run_demo(arguments.ranks, arguments.epochs, arguments.out, arguments.precision)


def _doctor(arguments: argparse.Namespace) -> int:
    from dpzoo.demo.doctor import examine

    problems = 0
    for finding in examine():
        print(finding, flush=True)
        problems += finding.level == "problem"
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 good, 1 the command found a fault, 2 it could not run."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (ImportError, ValueError) as error:
        print(f"dpzoo {arguments.command}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
