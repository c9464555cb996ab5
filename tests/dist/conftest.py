"""Put this folder on the path, so that tests and ranks can import the harness
and the rank programs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
