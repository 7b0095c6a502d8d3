"""The `dpzoo` command: parse, call, print."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    _add_convert(commands)
    _add_export(commands)
    return parser


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="write the weights of a training run as plain safetensors + config.json"
    )
    export.add_argument("folder", type=Path, help="folder of the run (its newest checkpoint), or one step_* in it")
    export.add_argument("out", type=Path, help="folder to write")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--average", dest="average", action="store_true", default=None, help="the averaged weights")
    which.add_argument("--trained", dest="average", action="store_false", help="not the average, if there is one")
    export.set_defaults(run=_export)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="turn files that cannot be read in parts into stores that can")
    formats = convert.add_subparsers(dest="format", required=True, metavar="format")
    drivaer = formats.add_parser("drivaer", help="DrivAerML folders (VTP, VTU, STL, CSV) to zarr, resumable")
    drivaer.add_argument("source", type=Path, help="folder of run_<i> folders, or one of them")
    drivaer.add_argument("destination", type=Path, help="folder for run_<i>.zarr")
    drivaer.add_argument("--cars", nargs="+", metavar="NAME", help="only these folders, such as run_1 run_7")
    drivaer.add_argument(
        "--order",
        choices=("shuffled", "hilbert", "morton"),
        default="shuffled",
        help="order of the rows: any window is a random sample, or a compact piece of space (default: %(default)s)",
    )
    for kind in ("surface", "volume"):
        drivaer.add_argument(f"--{kind}-fields", nargs="+", metavar="NAME", help=f"cell data to keep of the {kind}")
    drivaer.add_argument("--chunk-rows", type=int, help="rows per chunk, the unit that a rank reads")
    drivaer.add_argument("--seed", type=int, help="of the shuffle")
    drivaer.add_argument("--stream-velocity", type=float, help="m/s, kept with the store (38.889 in DrivAerML)")
    drivaer.set_defaults(run=_convert_drivaer)
    for name, what in (
        ("grib", "GRIB file, or a folder of them"),
        ("netcdf", "NetCDF file, or a folder of them"),
        ("zarr", "zarr store, or a folder of them"),
    ):
        _add_grid(formats.add_parser(name, help=f"{what}, to zarr in slabs of rows; resumable"), what)
    pickled = formats.add_parser("pickle", help="file that holds a whole pickled module, to safetensors")
    pickled.add_argument("source", type=Path, help="file of torch.save(model), or another pickle with modules")
    pickled.add_argument("destination", type=Path, help="safetensors file to write")
    pickled.add_argument("--unsafe-pickle", action="store_true", help="I trust the author of this file")
    pickled.set_defaults(run=_convert_pickle)


def _add_grid(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("source", type=Path, help=what)
    parser.add_argument("destination", type=Path, help="zarr store to write")
    parser.add_argument("--channels", nargs="+", metavar="NAME", help="only these, in this order (default: all)")
    parser.add_argument("--slabs", type=int, default=8, help="pieces of a field along y (default: %(default)s)")
    parser.set_defaults(run=_convert_grid)


def _convert_drivaer(arguments: argparse.Namespace) -> int:
    from dpzoo.datapipes.drivaerml.convert import Settings, convert

    asked = {key: value for key in vars(Settings()) if (value := getattr(arguments, key)) is not None}
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in asked.items()}
    settings = Settings(**given)
    failed = 0
    for outcome in convert(arguments.source, arguments.destination, settings, arguments.cars):
        print(f"{outcome.car}: {outcome.state}" + (f": {outcome.reason}" if outcome.reason else ""), flush=True)
        failed += outcome.state == "failed"
    return 1 if failed else 0


def _convert_grid(arguments: argparse.Namespace) -> int:
    from dpzoo.datapipes.grid.convert import convert_stores
    from dpzoo.datapipes.grid.grib import convert_grib

    convert = convert_grib if arguments.format == "grib" else convert_stores
    fields = convert(arguments.source, arguments.destination, arguments.channels, arguments.slabs)
    print(f"{arguments.destination}: {fields} fields", flush=True)
    return 0


def _convert_pickle(arguments: argparse.Namespace) -> int:
    if not arguments.unsafe_pickle:
        raise ValueError(
            f"{arguments.source} may hold code. It is read in a process of its own that imports and calls nothing the "
            "file names, but ask for as much memory and time as it likes it can: pass --unsafe-pickle if you trust it"
        )
    apart = [sys.executable, "-m", "dpzoo.weights.unpickle_apart", arguments.source, arguments.destination]
    return subprocess.run(apart, check=False).returncode


def _export(arguments: argparse.Namespace) -> int:
    from dpzoo.train import CheckpointError, export_run

    try:
        chosen = export_run(arguments.folder, arguments.out, arguments.average)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    print(f"{arguments.out}: weights of {chosen}", flush=True)
    return 0


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
