"""The job: objective + teacher + data -> draft, and the command line people use."""
