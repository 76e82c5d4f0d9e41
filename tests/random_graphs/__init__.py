"""Draw random modules, run each through TVM, and compare with eager PyTorch.

A drawn module is called a *program*: the text of a forward function, with the parameters, buffers,
submodules and inputs that it uses. An *author* writes programs line by line.
"""
