"""Scores of forecasts on a grid: ensembles, thresholds, spectra.

Functions of plain tensors. Fields that are ``ShardTensor``s stay cut: the scores are those of the whole field, the same
on every rank, and no rank ever holds it. Sums are in float32, or the fields' own dtype if that is finer.
"""

from dpzoo.metrics.categories import Contingency as Contingency
from dpzoo.metrics.categories import contingency as contingency
from dpzoo.metrics.categories import critical_success_index as critical_success_index
from dpzoo.metrics.crps import crps as crps
from dpzoo.metrics.crps import crps_field as crps_field
from dpzoo.metrics.ensemble import ensemble_rmse as ensemble_rmse
from dpzoo.metrics.ensemble import ensemble_spread as ensemble_spread
from dpzoo.metrics.ensemble import spread_skill_ratio as spread_skill_ratio
from dpzoo.metrics.fractions import fractions_skill_score as fractions_skill_score
from dpzoo.metrics.rank_histogram import rank_histogram as rank_histogram
from dpzoo.metrics.spectrum import radial_power_spectrum as radial_power_spectrum
