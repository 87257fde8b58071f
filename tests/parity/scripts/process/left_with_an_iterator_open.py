from torch.utils.data import DataLoader

loader = DataLoader(list(range(1000)), batch_size=2, num_workers=2, persistent_workers=True)
iterator = iter(loader)
print(next(iterator).tolist())
other = iter(DataLoader(list(range(1000)), num_workers=1))
print(next(other).tolist())
