import asyncio

from parity import show
from torch.utils.data import DataLoader, Dataset


async def fetch(i):
    await asyncio.sleep(0.001)
    return i * 2


async def both(i):
    return await asyncio.gather(fetch(i), fetch(i + 1))


class Fetched(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return asyncio.run(both(i))

    def __getitems__(self, indices):
        async def every():
            return await asyncio.gather(*map(both, indices))

        return asyncio.run(every())


show(*DataLoader(Fetched(), batch_size=2, num_workers=2))
show(*DataLoader(Fetched(), batch_size=None, num_workers=2))
