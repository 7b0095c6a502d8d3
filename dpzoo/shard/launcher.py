"""Which launcher started this process, read from its environment: torchrun, OpenMPI, SLURM, or none.

Reading only: nothing is connected and no variable is set, so the answer can be tested without a second process.
torchrun is asked first and SLURM last, because the outer launcher's variables are still visible to the inner one's
processes (a torchrun or mpirun inside a SLURM job), and the inner one is the one that numbered the ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_LOCALHOST = "127.0.0.1"
_DEFAULT_PORT = 29500
LAUNCHERS = ("torchrun", "openmpi", "slurm", "single")


@dataclass(frozen=True)
class Launch:
    """The place of this process among those started with it, and where they meet (None for a single process)."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise RuntimeError(
                f"{self.launcher} environment: rank {self.rank} of {self.world_size} processes is impossible; "
                f"the rank must be in 0..{self.world_size - 1}"
            )
        if self.local_rank < 0:
            raise RuntimeError(f"{self.launcher} environment: local rank {self.local_rank} is negative")


def detect_launch(environ: Mapping[str, str], launcher: str | None = None) -> Launch:
    """Read the launch from ``environ``; ``launcher`` names one of ``LAUNCHERS`` and skips the guess.

    Raises:
        ValueError: if ``launcher`` is not a known name.
        RuntimeError: if a launcher is recognised but a variable it should have set is missing or not a number.
    """
    if launcher is None:
        launcher = _guess(environ)
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher {launcher!r} is unknown; choose one of {', '.join(LAUNCHERS)}")
    if launcher == "torchrun":
        return _from_torchrun(environ)
    if launcher == "openmpi":
        return _from_openmpi(environ)
    if launcher == "slurm":
        return _from_slurm(environ)
    return Launch("single", rank=0, world_size=1, local_rank=0)


def _guess(environ: Mapping[str, str]) -> str:
    # Either variable alone counts: half an environment must be reported, not run as one process per rank.
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return "torchrun"
    if "OMPI_COMM_WORLD_RANK" in environ:
        return "openmpi"
    if "SLURM_PROCID" in environ:
        return "slurm"
    return "single"


def _from_torchrun(environ: Mapping[str, str]) -> Launch:
    rank = _integer(environ, "torchrun", "RANK")
    return Launch(
        "torchrun",
        rank=rank,
        world_size=_integer(environ, "torchrun", "WORLD_SIZE"),
        local_rank=_integer(environ, "torchrun", "LOCAL_RANK", default=rank),
        master_addr=_text(environ, "torchrun", "MASTER_ADDR"),
        master_port=_integer(environ, "torchrun", "MASTER_PORT"),
    )


def _from_openmpi(environ: Mapping[str, str]) -> Launch:
    world_size = _integer(environ, "openmpi", "OMPI_COMM_WORLD_SIZE")
    on_one_node = _integer(environ, "openmpi", "OMPI_COMM_WORLD_LOCAL_SIZE", default=0) == world_size
    address = environ.get("MASTER_ADDR") or (_LOCALHOST if on_one_node else None)
    if address is None:
        raise RuntimeError(
            f"openmpi environment: the {world_size} processes are spread over several nodes and MASTER_ADDR is not "
            "set; start with mpirun -x MASTER_ADDR=<address of the node of rank 0>"
        )
    return Launch(
        "openmpi",
        rank=_integer(environ, "openmpi", "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_integer(environ, "openmpi", "OMPI_COMM_WORLD_LOCAL_RANK"),
        master_addr=address,
        master_port=_integer(environ, "openmpi", "MASTER_PORT", default=_DEFAULT_PORT),
    )


def _from_slurm(environ: Mapping[str, str]) -> Launch:
    return Launch(
        "slurm",
        rank=_integer(environ, "slurm", "SLURM_PROCID"),
        # The step's count first: srun -n 2 inside a larger allocation starts 2 processes, not the allocation's number.
        world_size=_integer(environ, "slurm", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=_integer(environ, "slurm", "SLURM_LOCALID"),
        master_addr=_text(environ, "slurm", "MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"),
        master_port=_integer(environ, "slurm", "MASTER_PORT", default=_slurm_port(environ)),
    )


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Return a port below the ephemeral range, spread by job and step id: two jobs on one node rarely share it."""
    job = _integer(environ, "slurm", "SLURM_JOB_ID", "SLURM_JOBID", default=0)
    step = _integer(environ, "slurm", "SLURM_STEP_ID", "SLURM_STEPID", default=0)
    return 12000 + (job * 7 + step) % 16000


def _text(environ: Mapping[str, str], launcher: str, *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise RuntimeError(f"{launcher} environment: {' / '.join(names)} is not set; set it, or start with {launcher}")


def _integer(environ: Mapping[str, str], launcher: str, *names: str, default: int | None = None) -> int:
    if default is not None and not any(environ.get(name) for name in names):
        return default
    text = _text(environ, launcher, *names)
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{launcher} environment: {' / '.join(names)} is {text!r}, not a whole number") from None
