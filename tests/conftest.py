"""What all tests rely on."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a command that a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
