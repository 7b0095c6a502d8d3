"""Names and shapes of other libraries' weights, as ours and back: tables of rules that run both ways."""

from dpzoo.weights.dialects.dialect import ConvertedWeights as ConvertedWeights
from dpzoo.weights.dialects.dialect import Dialect as Dialect
from dpzoo.weights.dialects.find import find_dialect as find_dialect
from dpzoo.weights.dialects.find import get_dialect as get_dialect
from dpzoo.weights.dialects.find import list_dialects as list_dialects
