import vocabulary
from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(vocabulary.Text(["a b", "b c", "c d"]), batch_size=3, num_workers=2, collate_fn=list)
for text in ("a b", "b c", "c d"):
    vocabulary.add(text)
    for batch in loader:
        show(batch)
