"""Entry point of the command `nnxppo`."""

import contextlib
import dataclasses
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tyro
from rich.console import Console

from nnx_ppo.algorithms.cli.distill import prepare_distill
from nnx_ppo.algorithms.cli.environments import ListEnvironments, prepare_list
from nnx_ppo.algorithms.cli.errors import InputError
from nnx_ppo.algorithms.cli.evaluate import Evaluate, prepare_evaluate
from nnx_ppo.algorithms.cli.render import Render, prepare_render
from nnx_ppo.algorithms.cli.run_config import (
    DistillConfig,
    RunConfig,
    check_same_task,
    preset_run,
    settings_to_resume,
    student_of,
)
from nnx_ppo.algorithms.cli.train import prepare_train

_DESCRIPTION = "Train stateful policies with PPO, evaluate, film and distil them."


@dataclasses.dataclass(frozen=True)
class _Command:
    """A subcommand.

    Attributes:
        default: The values of its options before any is given.
        prepare: Makes the parts; raises what is wrong with the input. Returns what does the work.
        from_first: Makes the defaults that belong to its first argument, where it has such.
        first: What that argument is called.
    """

    default: Any
    prepare: Callable[[Any, Console], Callable[[], None]]
    from_first: Callable[[str], Any] | None = None
    first: str = ""


_COMMANDS = {
    "train": _Command(RunConfig(tyro.MISSING), prepare_train, preset_run, "ENV"),
    "eval": _Command(Evaluate(tyro.MISSING), prepare_evaluate),
    "render": _Command(Render(tyro.MISSING), prepare_render),
    "distill": _Command(DistillConfig(tyro.MISSING), prepare_distill, student_of, "TEACHER"),
    "envs": _Command(ListEnvironments(), prepare_list),
}
_INPUT_ERRORS = (
    InputError,
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    ModuleNotFoundError,
    pickle.UnpicklingError,
)
_JAX_NOTE = "JAX_TRACEBACK_FILTERING"


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        The exit code: 0, 2 where the input is at fault, or 130 after Ctrl-C.
    """
    args = list(sys.argv[1:] if args is None else args)
    console = Console()
    try:
        with _warnings_in_a_line():
            return _run(args, console)
    except KeyboardInterrupt as interrupt:
        _complain("interrupted", interrupt)
        return 130


def _run(args: list[str], console: Console) -> int:
    """Run the command; return the exit code."""
    try:
        command = _parse(args)
        (prepare,) = (c.prepare for c in _COMMANDS.values() if type(c.default) is type(command))
        work = prepare(command, console)
    except _INPUT_ERRORS as error:
        _complain(str(error), error)
        return 2
    try:
        work()  # errors from here on are no fault of the input, and show where they arose
    except InputError as error:
        _complain(str(error), error)
        return 2
    return 0


def _complain(message: str, error: BaseException) -> None:
    """Print what is wrong, and the notes of an error, but for JAX's on how it shows tracebacks."""
    notes = [note for note in getattr(error, "__notes__", []) if _JAX_NOTE not in note]
    Console(stderr=True, style="red").print(
        "\n".join([f"nnxppo: {message}", *notes]), markup=False, highlight=False, soft_wrap=True
    )


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show warnings without the place in the code that they come from."""

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        print(f"nnxppo: {message}", file=sys.stderr)  # the live display puts it above itself

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _parse(args: list[str]) -> Any:
    """Parse the arguments; preset, teacher or the run that goes on give the defaults.

    Raises:
        ValueError: An option stands before the argument that decides the defaults.
    """
    name = args[0] if args else ""
    if name not in _COMMANDS:
        return _parse_without_command(args)
    default = _defaults(name, args[1:])
    before: dict[str, str] = getattr(default, "overrides", {})
    if before:  # tyro would make options of the names in it; given ones come on top instead
        default = dataclasses.replace(default, overrides={})
    found = tyro.cli(type(default), default=default, args=args[1:], prog=f"nnxppo {name}")
    if before:
        found = dataclasses.replace(found, overrides={**before, **found.overrides})
    if isinstance(found, RunConfig | DistillConfig) and found.resume is not None:
        check_same_task(found)
    return found


def _parse_without_command(args: list[str]) -> Any:
    """Show which commands there are, or that there is none of that name."""
    defaults = {name: command.default for name, command in _COMMANDS.items()}
    titles = {name: (value.__doc__ or "").partition("\n")[0] for name, value in defaults.items()}
    commands = tyro.extras.subcommand_type_from_defaults(defaults, titles, prefix_names=False)
    return tyro.cli(commands, args=args, prog="nnxppo", description=_DESCRIPTION)


def _defaults(name: str, args: list[str]) -> Any:
    """Return the defaults of a subcommand for its arguments."""
    command = _COMMANDS[name]
    if command.from_first is None or args[:1] in ([], ["-h"], ["--help"]):
        return command.default
    resumed = _value_of("--resume", args)
    if resumed is not None:
        return settings_to_resume(resumed, type(command.default))
    if args[-1] == "--resume":
        return command.default  # the parser says what lacks
    if args[0].startswith("-"):
        raise ValueError(
            f"The {command.first} comes first, since it decides the defaults: nnxppo {name} "
            f"{command.first} {args[0]} …"
        )
    return command.from_first(args[0])


def _value_of(option: str, args: list[str]) -> str | None:
    """Return the value of an option among arguments, None where it is not there."""
    for word, following in zip(args, [*args[1:], None], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None
