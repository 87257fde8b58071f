class Registry:
    def __init__(self):
        self._functions = {}

    def register(self, f, name=None):
        self._functions[name or f.__name__] = f
        return f

    def __getitem__(self, name):
        return self._functions[name]


REGISTRY = Registry()
