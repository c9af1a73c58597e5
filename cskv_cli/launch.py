"""What a process that `accelerate launch` started knows before torch is imported."""

import os


def is_main() -> bool:
    """Whether this is the process that writes and prints; so is one that was started alone."""
    return os.environ.get("RANK", "0") == "0"
