"""An example to copy: predict the arrival delays of the flights that left New York in 2013, on machines that may vanish."""
