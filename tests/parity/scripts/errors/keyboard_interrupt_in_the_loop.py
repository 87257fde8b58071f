from torch.utils.data import DataLoader

try:
    for batch in DataLoader(list(range(10)), batch_size=2, num_workers=2):
        print(batch.tolist())
        if 3 in batch:
            raise KeyboardInterrupt
except KeyboardInterrupt:
    print("stopped by hand")
