"""A model's methods for layers from the Kernel Hub, with Transformers' names."""

from abc import abstractmethod
from enum import Flag

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.kernels.hub.config import KernelConfig

NOTHING_TO_DO = (
    "use_kernels=True: cuformers' own kernels need no flag, and nothing is taken from the hub unless kernel_config "
    "names it; model.kernels() shows what computes what."
)


class HubLayers:
    """The part of a model that lets other people's kernels compute some of its layers."""

    training: bool
    _use_kernels = False
    _kernel_config: KernelConfig | None = None

    @abstractmethod
    def _take_layers(self, layers: KernelConfig | None) -> None:
        """Chooses the kernels anew with these layers in them; all stays as it is where that is not possible."""

    @property
    def use_kernels(self) -> bool:
        """Whether hub kernels are switched on. Assigning it calls `set_use_kernels`."""
        return self._use_kernels

    @use_kernels.setter
    def use_kernels(self, value: bool) -> None:
        self.set_use_kernels(value)

    @property
    def kernel_config(self) -> KernelConfig | None:
        """The layers that come from the hub while `use_kernels` is on; None where none was ever named."""
        return self._kernel_config

    @property
    def _layers_wanted(self) -> KernelConfig | None:
        return self._kernel_config if self._use_kernels else None

    def set_use_kernels(
        self,
        use_kernels: bool,
        kernel_config: KernelConfig | None = None,
        mode: Flag | None = None,
        *,
        allow_all_kernels: bool = False,
    ) -> None:
        """Lets other people's kernels compute some layers of this model, and of no other; or takes them out again.

        Each kernel is compared with plain PyTorch on the model's own shapes before it is used, and chosen again for
        each mode: in training one without a backward pass gives way to our own.

        Args:
            use_kernels: False brings back our own kernels, bit for bit.
            kernel_config: which layers, from where; None means those named last.
            mode: as in Transformers, a kernels.Mode; the model's own, which follows train() and eval(), or None.
            allow_all_kernels: takes kernels of any publisher. A kernel is code that runs with your rights.

        Raises:
            ImportError: the package `kernels` is missing.
            ValueError: an impossible argument, or a kernel that can't be had or computes something else; the present
                kernels stay then.
        """
        self._check(use_kernels, kernel_config, mode)
        config = self._kernel_config if kernel_config is None else kernel_config
        if config is not None and allow_all_kernels:
            config = config.trusting()
        self._take_layers(config if use_kernels else None)
        self._use_kernels, self._kernel_config = use_kernels, config
        if use_kernels and (config is None or not config.rules):
            notice(NOTHING_TO_DO, once=True)

    def _check(self, use_kernels: bool, kernel_config: KernelConfig | None, mode: Flag | None) -> None:
        if not isinstance(use_kernels, bool):
            raise bad_argument("use_kernels", use_kernels, "True or False")
        if kernel_config is not None and not isinstance(kernel_config, KernelConfig):
            raise bad_argument("kernel_config", kernel_config, "a KernelConfig or None")
        if kernel_config is not None and not use_kernels:
            raise bad_argument("kernel_config", kernel_config, "None with use_kernels=False")
        own = "TRAINING" if self.training else "INFERENCE"
        if mode is not None and mode.name != own:
            remedy = "model.train() and model.eval() change it; steps are not compiled by torch.compile here."
            raise bad_argument("mode", mode, f"None or Mode.{own}, the model's own", remedy)
