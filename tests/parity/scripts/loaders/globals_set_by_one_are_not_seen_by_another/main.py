import state
from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(state.Writer(), batch_size=4, num_workers=2)
show(*loader)
show(*DataLoader(state.Reader(), batch_size=4, num_workers=2))
show(state.seen, state.Reader.note)
