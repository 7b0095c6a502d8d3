"""`dpzoo demo`: a dense ViT forecasts real ERA5 fields on one process and on two, and the losses are compared.

`data.py` reads the rows of one rank, `train.py` is an ordinary training loop, `run.py` starts the runs and prints the
comparison, `figure.py` draws the forecast. `convert_era5.py` made the data in `data/`.
"""
