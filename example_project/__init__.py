"""An example to copy: predict the arrival delays of New York's flights of 2013, on machines that may vanish."""
