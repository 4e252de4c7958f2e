"""gpupipe: torchvision's training pixels, faster, on the GPU or the CPU.

>>> import gpupipe as gp
>>> gp.Recipe.train(size=224).output_size
(224, 224)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpupipe.backends.base import Options as Options
    from gpupipe.collating.kinds import Collate as Collate
    from gpupipe.collating.kinds import Keep as Keep
    from gpupipe.collating.kinds import Pad as Pad
    from gpupipe.collating.kinds import Ragged as Ragged
    from gpupipe.collating.kinds import Stack as Stack
    from gpupipe.collating.samples import collate as collate
    from gpupipe.errors import BackendError as BackendError
    from gpupipe.errors import BackendUnavailable as BackendUnavailable
    from gpupipe.errors import ConfigError as ConfigError
    from gpupipe.errors import DecodeError as DecodeError
    from gpupipe.errors import GpupipeError as GpupipeError
    from gpupipe.errors import RecordError as RecordError
    from gpupipe.errors import SourceError as SourceError
    from gpupipe.errors import StateError as StateError
    from gpupipe.faults import BadSample as BadSample
    from gpupipe.faults import BadSamples as BadSamples
    from gpupipe.faults import OnError as OnError
    from gpupipe.geometry import transform_boxes as transform_boxes
    from gpupipe.inspection import Inspection as Inspection
    from gpupipe.inspection import inspect_source as inspect_source
    from gpupipe.loader import Loader as Loader
    from gpupipe.loader import LoaderStats as LoaderStats
    from gpupipe.measure.bench import BenchReport as BenchReport
    from gpupipe.measure.bench import bench as bench
    from gpupipe.measure.diagnosing import Diagnosis as Diagnosis
    from gpupipe.measure.diagnosing import Finding as Finding
    from gpupipe.measure.diagnosing import diagnose as diagnose
    from gpupipe.measure.profiling import ProfileReport as ProfileReport
    from gpupipe.measure.profiling import profile as profile
    from gpupipe.measure.selfcheck import SelfCheck as SelfCheck
    from gpupipe.measure.selfcheck import selfcheck as selfcheck
    from gpupipe.measure.tuning import TuneReport as TuneReport
    from gpupipe.measure.tuning import load_options as load_options
    from gpupipe.measure.tuning import tune as tune
    from gpupipe.measure.watch import Watch as Watch
    from gpupipe.measure.watch import WatchReport as WatchReport
    from gpupipe.measure.watch import watch as watch
    from gpupipe.packing import PackOptions as PackOptions
    from gpupipe.packing import pack as pack
    from gpupipe.parity import Report as Report
    from gpupipe.parity import check_parity as check_parity
    from gpupipe.plan import make_plan as make_plan
    from gpupipe.prefetching import prefetch as prefetch
    from gpupipe.recipe import Output as Output
    from gpupipe.recipe import Recipe as Recipe
    from gpupipe.records import Record as Record
    from gpupipe.remote.counters import RemoteStats as RemoteStats
    from gpupipe.remote.retries import Retries as Retries
    from gpupipe.sampling.batch_sampler import BatchSampler as BatchSampler
    from gpupipe.sampling.cost import CostAware as CostAware
    from gpupipe.sampling.cost import measure_costs as measure_costs
    from gpupipe.sampling.length import LengthBuckets as LengthBuckets
    from gpupipe.sampling.repeated import Repeated as Repeated
    from gpupipe.sampling.samplers import Sharding as Sharding
    from gpupipe.sampling.samplers import ShardOrder as ShardOrder
    from gpupipe.sampling.samplers import Weighted as Weighted
    from gpupipe.sampling.shuffle_quality import ShuffleQuality as ShuffleQuality
    from gpupipe.sampling.shuffle_quality import shuffle_quality as shuffle_quality
    from gpupipe.sources import open_source as open_source
    from gpupipe.sources.folder import ImageFolder as ImageFolder
    from gpupipe.sources.remote import stage as stage
    from gpupipe.steps import AutoAugment as AutoAugment
    from gpupipe.steps import CenterCrop as CenterCrop
    from gpupipe.steps import ColorJitter as ColorJitter
    from gpupipe.steps import CutMix as CutMix
    from gpupipe.steps import GaussianBlur as GaussianBlur
    from gpupipe.steps import Grayscale as Grayscale
    from gpupipe.steps import Mix as Mix
    from gpupipe.steps import MixUp as MixUp
    from gpupipe.steps import Normalize as Normalize
    from gpupipe.steps import RandAugment as RandAugment
    from gpupipe.steps import RandomAdjustSharpness as RandomAdjustSharpness
    from gpupipe.steps import RandomAffine as RandomAffine
    from gpupipe.steps import RandomApply as RandomApply
    from gpupipe.steps import RandomAutocontrast as RandomAutocontrast
    from gpupipe.steps import RandomChoice as RandomChoice
    from gpupipe.steps import RandomCrop as RandomCrop
    from gpupipe.steps import RandomEqualize as RandomEqualize
    from gpupipe.steps import RandomErasing as RandomErasing
    from gpupipe.steps import RandomGrayscale as RandomGrayscale
    from gpupipe.steps import RandomHorizontalFlip as RandomHorizontalFlip
    from gpupipe.steps import RandomInvert as RandomInvert
    from gpupipe.steps import RandomPosterize as RandomPosterize
    from gpupipe.steps import RandomResizedCrop as RandomResizedCrop
    from gpupipe.steps import RandomRotation as RandomRotation
    from gpupipe.steps import RandomSolarize as RandomSolarize
    from gpupipe.steps import RandomVerticalFlip as RandomVerticalFlip
    from gpupipe.steps import Resize as Resize
    from gpupipe.steps import TrivialAugmentWide as TrivialAugmentWide
    from gpupipe.views import Views as Views

__version__ = "0.1.0"

# Public name -> module. Imported on first use: `import gpupipe` imports neither torch nor DALI.
_PUBLIC = {
    "AutoAugment": "gpupipe.steps",
    "BackendError": "gpupipe.errors",
    "BackendUnavailable": "gpupipe.errors",
    "BadSample": "gpupipe.faults",
    "BadSamples": "gpupipe.faults",
    "BatchSampler": "gpupipe.sampling.batch_sampler",
    "BenchReport": "gpupipe.measure.bench",
    "CenterCrop": "gpupipe.steps",
    "Collate": "gpupipe.collating.kinds",
    "ColorJitter": "gpupipe.steps",
    "ConfigError": "gpupipe.errors",
    "CostAware": "gpupipe.sampling.cost",
    "CutMix": "gpupipe.steps",
    "DecodeError": "gpupipe.errors",
    "Diagnosis": "gpupipe.measure.diagnosing",
    "Finding": "gpupipe.measure.diagnosing",
    "GaussianBlur": "gpupipe.steps",
    "GpupipeError": "gpupipe.errors",
    "Grayscale": "gpupipe.steps",
    "ImageFolder": "gpupipe.sources.folder",
    "Inspection": "gpupipe.inspection",
    "Keep": "gpupipe.collating.kinds",
    "LengthBuckets": "gpupipe.sampling.length",
    "Loader": "gpupipe.loader",
    "LoaderStats": "gpupipe.loader",
    "Mix": "gpupipe.steps",
    "MixUp": "gpupipe.steps",
    "Normalize": "gpupipe.steps",
    "OnError": "gpupipe.faults",
    "Options": "gpupipe.backends.base",
    "Output": "gpupipe.recipe",
    "PackOptions": "gpupipe.packing",
    "Pad": "gpupipe.collating.kinds",
    "ProfileReport": "gpupipe.measure.profiling",
    "Ragged": "gpupipe.collating.kinds",
    "RandAugment": "gpupipe.steps",
    "RandomAdjustSharpness": "gpupipe.steps",
    "RandomAffine": "gpupipe.steps",
    "RandomApply": "gpupipe.steps",
    "RandomAutocontrast": "gpupipe.steps",
    "RandomChoice": "gpupipe.steps",
    "RandomCrop": "gpupipe.steps",
    "RandomEqualize": "gpupipe.steps",
    "RandomErasing": "gpupipe.steps",
    "RandomGrayscale": "gpupipe.steps",
    "RandomHorizontalFlip": "gpupipe.steps",
    "RandomInvert": "gpupipe.steps",
    "RandomPosterize": "gpupipe.steps",
    "RandomResizedCrop": "gpupipe.steps",
    "RandomRotation": "gpupipe.steps",
    "RandomSolarize": "gpupipe.steps",
    "RandomVerticalFlip": "gpupipe.steps",
    "Recipe": "gpupipe.recipe",
    "Record": "gpupipe.records",
    "RecordError": "gpupipe.errors",
    "RemoteStats": "gpupipe.remote.counters",
    "Repeated": "gpupipe.sampling.repeated",
    "Report": "gpupipe.parity",
    "Resize": "gpupipe.steps",
    "Retries": "gpupipe.remote.retries",
    "SelfCheck": "gpupipe.measure.selfcheck",
    "ShardOrder": "gpupipe.sampling.samplers",
    "Sharding": "gpupipe.sampling.samplers",
    "ShuffleQuality": "gpupipe.sampling.shuffle_quality",
    "SourceError": "gpupipe.errors",
    "Stack": "gpupipe.collating.kinds",
    "StateError": "gpupipe.errors",
    "TrivialAugmentWide": "gpupipe.steps",
    "TuneReport": "gpupipe.measure.tuning",
    "Views": "gpupipe.views",
    "Watch": "gpupipe.measure.watch",
    "WatchReport": "gpupipe.measure.watch",
    "Weighted": "gpupipe.sampling.samplers",
    "bench": "gpupipe.measure.bench",
    "check_parity": "gpupipe.parity",
    "collate": "gpupipe.collating.samples",
    "diagnose": "gpupipe.measure.diagnosing",
    "inspect_source": "gpupipe.inspection",
    "load_options": "gpupipe.measure.tuning",
    "make_plan": "gpupipe.plan",
    "measure_costs": "gpupipe.sampling.cost",
    "open_source": "gpupipe.sources",
    "pack": "gpupipe.packing",
    "prefetch": "gpupipe.prefetching",
    "profile": "gpupipe.measure.profiling",
    "selfcheck": "gpupipe.measure.selfcheck",
    "shuffle_quality": "gpupipe.sampling.shuffle_quality",
    "stage": "gpupipe.sources.remote",
    "transform_boxes": "gpupipe.geometry",
    "tune": "gpupipe.measure.tuning",
    "watch": "gpupipe.measure.watch",
}

__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpupipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
