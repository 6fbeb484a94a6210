dump = load = verify = read_manifest = LoadReport = Manifest = None
