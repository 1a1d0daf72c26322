"""Makes `import ranks` and the in-tree package work from any folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
