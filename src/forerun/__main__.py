"""The entry point of the command `forerun`, and of `python -m forerun`."""

# Not `signal`: importing that takes several milliseconds, in which Ctrl-C would print a traceback.
import _signal  # type: ignore[import-not-found]
import os

if _signal.getsignal(_signal.SIGINT) is not _signal.SIG_IGN:
    _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))  # until `install`, which also imports modules

from forerun import interrupt


def main() -> None:
    """Run the command of the command line, and end the process with its exit code."""
    interrupt.install()
    from forerun.cli.main import main as run

    interrupt.finish(run())


if __name__ == "__main__":
    main()
