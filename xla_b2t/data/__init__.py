"""Trial files to pre-batched groups, and who reads which group when. numpy and h5py only: nothing here knows torch."""
