"""python -m loopback_hub FOLDER [--port N] [--trusted org1,org2] [--token TOKEN] [--until-eof]"""

import argparse
import contextlib
import os
import sys
import threading
from pathlib import Path

from loopback_hub.server import LoopbackHub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loopback_hub", description="A loopback Hub.")
    parser.add_argument("folder", type=Path, help="where repositories are kept")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port")
    parser.add_argument("--trusted", default="", help="trusted publishers, separated by commas")
    parser.add_argument("--token", help="token that writers must send")
    parser.add_argument(
        "--until-eof", action="store_true", help="end with standard input: with who holds its pipe"
    )
    arguments = parser.parse_args()
    if arguments.until_eof:
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
    publishers = [name for name in arguments.trusted.split(",") if name]
    with LoopbackHub(
        arguments.folder,
        port=arguments.port,
        trusted_publishers=publishers,
        token=arguments.token,
    ) as hub:
        for name, value in hub.environment().items():
            print(f"export {name}={value}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            hub.join()


def _end_with_standard_input() -> None:
    """A process that is killed cannot end its children; the kernel closes its pipes."""
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
