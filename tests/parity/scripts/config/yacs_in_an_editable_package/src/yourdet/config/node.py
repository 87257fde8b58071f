class CfgNode(dict):
    def __init__(self, values=()):
        super().__init__({k: CfgNode(v) if isinstance(v, dict) else v for k, v in dict(values).items()})
        self.__dict__["frozen"] = False

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        if self.__dict__["frozen"]:
            raise AttributeError(f"frozen: {name}")
        self[name] = value

    def merge(self, other):
        for key, value in other.items():
            if isinstance(value, dict):
                self[key].merge(value)
            else:
                self[key] = value

    def freeze(self):
        self.__dict__["frozen"] = True
        for value in self.values():
            if isinstance(value, CfgNode):
                value.freeze()
