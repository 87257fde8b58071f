import threading


class Config:
    def __init__(self):
        self._lock = threading.RLock()
        self.size = 4

    def set(self, **k):
        with self._lock:
            self.__dict__.update(k)


cfg = Config()
