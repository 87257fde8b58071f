class DataError(Exception):
    pass


class BadImage(DataError):
    pass
