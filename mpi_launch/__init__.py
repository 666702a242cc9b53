"""Starts a Python program on several ranks through MPI: `python -m mpi_launch -n 4 script.py`.

It finds mpirun, knows what MPICH and Open MPI want, sees to it that one rank's exception ends the whole job,
passes the exit code on, and leaves no process behind.
"""
