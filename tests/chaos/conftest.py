"""The kills belong to `make soak`: many real processes at once, which crowd out whatever runs beside them.

RESILIENT_CHAOS=1 asks for their short form alone, with nothing else beside it.
"""

import os

_ASKED_FOR = "1" in map(os.environ.get, ("RESILIENT_SOAK", "RESILIENT_CHAOS"))
collect_ignore = [] if _ASKED_FOR else ["test_kill_table.py", "test_range_kills.py"]
