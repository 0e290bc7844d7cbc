"""How weights come to be and leave: parallelism, the loop, checkpoints, trackers, publishing."""
