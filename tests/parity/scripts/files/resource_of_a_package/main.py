from parity import show
from torch.utils.data import DataLoader
from vocabulary.tokens import Tokens

for batch in DataLoader(Tokens(["b a", "c b"]), batch_size=2, num_workers=2):
    show(batch)
