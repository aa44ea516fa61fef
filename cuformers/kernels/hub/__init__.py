"""Layers that others publish (the Kernel Hub), in the place of our ops, for one model.

A hub layer is a stateless module class whose `forward` is meant to replace that of a module of Transformers: it reads
the module's own attributes (an RMSNorm's `weight` and `variance_epsilon`). Here it is called on a small stand-in that
holds them, and what rides along elsewhere (a norm before a product, an activation behind it, a rotation before the
cache) is taken out of the fused ops, so that the layer really runs:

    KernelConfig (config.py, rules.py)  what the user asks for: layer -> device, mode -> source
    source.py, versions.py, package.py  a source becomes a class, by the package `kernels`
    layers.py                           the layers that can be replaced, and what a model uses of them
    adapters.py                         a class becomes a plain function of tensors
    gate.py, capturing.py               it is compared with the reference, and captured, before a model gets it
    compose.py                          a table of kernels without the replaced parts, which stand beside it
    choose.py, taken.py                 all of this, for one model, device and mode; and how it is listed

A table is never changed: a model gets another one, and gets the first one back when hub layers are switched off.
"""
