from unittest import mock

import remote
from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(remote.Downloads(), batch_size=2, num_workers=2)
with mock.patch.object(remote, "download", lambda url: url.upper()):
    for batch in loader:
        show(batch)
for batch in loader:
    show(batch)
