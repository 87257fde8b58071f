class Aug:
    def apply(self, x, strength=1):
        return x * strength

    def __call__(self, x):
        return self.apply(x)
