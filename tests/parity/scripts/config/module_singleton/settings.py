class Settings:
    def __init__(self):
        self.size = 2
        self.names = ["dog"]


settings = Settings()
