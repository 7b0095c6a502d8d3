"""The files of a DrivAerML folder (`boundary_i.vtp`, `volume_i.vtu` or its parts, `drivaer_i.stl`, CSV), read whole.

Format of the data set: Ashton et al. (2024), "DrivAerML: high-fidelity CFD dataset for road-car external aerodynamics",
arXiv:2408.11969. Pressure and wall shear stress are kinematic (m2/s2), velocity m/s, lengths m.
"""
