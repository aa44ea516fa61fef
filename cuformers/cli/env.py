"""`cuformers env`: what this machine, its driver and its GPUs can do, and why not more."""

import json
from collections.abc import Mapping, Sequence

from cuformers.base import env
from cuformers.cli.parser import verb_parser
from cuformers.cuda.report import Probes, gather

ABOUT = "What this machine, its driver and its GPUs can do, and why not more."
EXIT_CODES = "Exit code: 0, or 1 where a GPU is there and torch can't use it."


def main(argv: Sequence[str], probes: Probes | None = None) -> int:
    """Prints the report.

    Args:
        argv: arguments after the verb.
        probes: stands for this machine in tests.

    Returns:
        0; 1 where a GPU is there and torch can't use it, or where one is required and none can be used.
    """
    parser = verb_parser("env", f"{ABOUT} {EXIT_CODES}")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--require-gpu", action="store_true", help="exit with 1 where no GPU can be used")
    what.add_argument(
        "--attention",
        action="store_true",
        help="instead: what each attention backend can here and, on a GPU, its measured TFLOP/s",
    )
    arguments = parser.parse_args(argv)
    if arguments.attention:
        return _attention(arguments.json)
    report, verdict = gather(this_machine() if probes is None else probes)
    if arguments.json:
        print(json.dumps(report.data(), indent=2))
    else:
        _show(report.data())
    return int(verdict.broken or (arguments.require_gpu and not verdict.gpu))


def this_machine() -> Probes:
    """Probes that ask this machine."""
    from cuformers.cli import probes
    from cuformers.cuda import driver, runtime

    return Probes(
        driver=driver.read,
        torch=runtime.read,
        environment=env.get,
        versions=probes.versions,
        packages=probes.packages,
        attention=probes.attention,
        kernels=probes.kernels,
    )


def _attention(as_json: bool) -> int:
    """Prints the backends of this machine; 0."""
    from dataclasses import asdict

    from cuformers.cli.attention_matrix import matrix
    from cuformers.cli.probes import usual_place
    from cuformers.cuda import runtime

    data: dict[str, dict | list[dict]] = {"attention": [asdict(row) for row in matrix(*usual_place(runtime.read()))]}
    if as_json:
        print(json.dumps(data, indent=2))
    else:
        _show(data)
    return 0


def _show(data: Mapping[str, dict | list[dict]]) -> None:
    from cuformers.cli.tables import make_console, show

    show(data, make_console())
