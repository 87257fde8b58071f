from torch.utils.data import DataLoader

loader = DataLoader(list(range(10)), batch_size=4, num_workers=2)
for name, value in {
    "batch_size": 2,
    "dataset": [],
    "sampler": [1],
    "drop_last": True,
    "persistent_workers": True,
}.items():
    try:
        setattr(loader, name, value)
    except ValueError as error:
        print(name, error)
loader.note = "free"
loader.pin_memory = False
print(loader.note, len(loader))
