CFG = {"size": 1, "nested": {"depth": 0}}
