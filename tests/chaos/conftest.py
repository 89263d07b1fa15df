"""The chaos tests belong to `make soak`: many real processes at once, which crowd out whatever runs beside them.

RESILIENT_CHAOS=1 asks for their short form alone, with nothing else beside it.
"""

import os

collect_ignore_glob = [] if "1" in map(os.environ.get, ("RESILIENT_SOAK", "RESILIENT_CHAOS")) else ["test_*.py"]
