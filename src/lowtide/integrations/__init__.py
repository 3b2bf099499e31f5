"""Lowtide inside the trainers of other packages; each file needs its package only when it is used."""
