def get():
    import __main__

    return __main__.OPT
