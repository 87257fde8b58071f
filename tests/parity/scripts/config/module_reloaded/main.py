import importlib
from pathlib import Path

import rules
from data import Ruled
from parity import show
from torch.utils.data import DataLoader

for limit in (1, 22):
    Path(rules.__file__).write_text(f"LIMIT = {limit}\n\n\ndef cut(x):\n    return min(x, LIMIT)\n")
    importlib.reload(rules)
    for batch in DataLoader(Ruled(), batch_size=4, num_workers=2):
        show(batch)
