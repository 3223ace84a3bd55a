OPTIONS: list = []
