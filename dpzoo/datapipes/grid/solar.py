"""The sun's height over the horizon, as a field."""

import numpy as np


def cos_zenith(time: np.datetime64, latitude: np.ndarray, longitude: np.ndarray) -> np.ndarray:
    """Cosine of the solar zenith angle, float32, of the broadcast shape; negative at night.

    Declination and equation of time by the Fourier series of Spencer (1971, "Fourier series representation of the
    position of the sun", Search 2(5), 172): within 0.01 of the cosine of an ephemeris.

    Args:
        time: UTC.
        latitude, longitude: degrees, north and east.
    """
    year = time.astype("datetime64[Y]").astype("datetime64[s]")
    length = ((year.astype("datetime64[Y]") + 1).astype("datetime64[s]") - year) / np.timedelta64(1, "D")
    days = (time - year) / np.timedelta64(1, "D")
    g = 2 * np.pi * days / length
    declination = (
        0.006918
        - 0.399912 * np.cos(g)
        + 0.070257 * np.sin(g)
        - 0.006758 * np.cos(2 * g)
        + 0.000907 * np.sin(2 * g)
        - 0.002697 * np.cos(3 * g)
        + 0.00148 * np.sin(3 * g)
    )
    equation = (
        0.000075 + 0.001868 * np.cos(g) - 0.032077 * np.sin(g) - 0.014615 * np.cos(2 * g) - 0.040849 * np.sin(2 * g)
    )
    hour = 2 * np.pi * (days % 1) - np.pi + equation + np.deg2rad(np.asarray(longitude, np.float64))
    phi = np.deg2rad(np.asarray(latitude, np.float64))
    height = np.sin(phi) * np.sin(declination) + np.cos(phi) * np.cos(declination) * np.cos(hour)
    return np.asarray(height, np.float32)
