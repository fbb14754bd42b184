"""``gradwire`` and ``python -m gradwire``, as ``torchrun -m gradwire advise`` needs it."""

import gc
import sys


def main() -> int:
    """Runs the command line; returns the exit code, also of an interrupt while it is still being imported.

    What torch's modules hold is no garbage, and looking for some of it would take a third of a short command's time.
    """
    gc.set_threshold(10_000)
    try:
        from gradwire import cli

        return cli.main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if "triton" not in sys.modules:  # torch's compiler loads it, and its bindings complain of objects that are left
            gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
