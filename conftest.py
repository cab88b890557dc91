"""For all tests: what a test run may inherit from the shell that started it and must not."""

from __future__ import annotations

import signal
import threading

# A shell without job control lets what it starts in the background ignore Ctrl-C, and so would the programs that tests
# start in order to interrupt them.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
