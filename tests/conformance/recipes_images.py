"""Recipes for layers that prepare images, and for all that draw random numbers."""

import keras

from tests.conformance.inputs import ids, images, normal
from tests.conformance.recipes import Branch
from tests.conformance.recipes_layers import of

L = keras.layers
PICTURES = (images(8, 8, 3),)
LINE, PLANE, SPACE = (normal(6, 3),), (normal(4, 4, 3),), (normal(3, 3, 3, 2),)


def _picture(layer, **arguments):
    return of(layer, PICTURES, stem=False, **arguments)


def _labelled(layer, tensors):
    """Calls a layer that mixes images and labels; both are kept."""
    pictures, labels = tensors
    found = layer({"images": pictures, "labels": keras.ops.one_hot(labels, 3, dtype="float64")})
    flat = keras.layers.Flatten(name=f"{layer.name}__flat")(found["images"])
    return keras.ops.concatenate([flat, found["labels"]], axis=-1)


IMAGES = {
    "AutoContrast": _picture(L.AutoContrast),
    "CenterCrop": _picture(L.CenterCrop, height=4, width=4),
    "ContrastLimitedAdaptiveHistogramEqualization": _picture(
        L.ContrastLimitedAdaptiveHistogramEqualization, tile_grid_size=(2, 2)
    ),
    "Equalization": _picture(L.Equalization),
    "Pipeline": Branch(
        lambda name: L.Pipeline([L.CenterCrop(4, 4), L.Rescaling(0.1)], name=name), PICTURES, stem=False
    ),
    "Resizing": _picture(L.Resizing, height=5, width=5),
}

NOISE = dict(
    AlphaDropout=of(L.AlphaDropout, rate=0.3),
    Dropout=of(L.Dropout, rate=0.3),
    GaussianDropout=of(L.GaussianDropout, rate=0.3),
    GaussianNoise=of(L.GaussianNoise, stddev=0.3),
    SpatialDropout1D=of(L.SpatialDropout1D, LINE, rate=0.3),
    SpatialDropout2D=of(L.SpatialDropout2D, PLANE, rate=0.3),
    SpatialDropout3D=of(L.SpatialDropout3D, SPACE, rate=0.3),
)

MIXED = (PICTURES[0], ids(below=3))

RANDOM_IMAGES = dict(
    CutMix=of(L.CutMix, MIXED, stem=False, apply=_labelled),
    MixUp=of(L.MixUp, MIXED, stem=False, apply=_labelled),
    RandomBrightness=_picture(L.RandomBrightness, factor=0.3),
    RandomColorDegeneration=_picture(L.RandomColorDegeneration, factor=0.5),
    RandomColorJitter=_picture(
        L.RandomColorJitter,
        brightness_factor=0.3,
        contrast_factor=0.3,
        saturation_factor=(0.3, 0.6),
        hue_factor=0.2,
    ),
    RandomContrast=_picture(L.RandomContrast, factor=0.5),
    RandomCrop=_picture(L.RandomCrop, height=4, width=4),
    RandomElasticTransform=_picture(L.RandomElasticTransform),
    RandomErasing=_picture(L.RandomErasing),
    RandomFlip=_picture(L.RandomFlip),
    RandomGaussianBlur=_picture(L.RandomGaussianBlur),
    RandomGrayscale=_picture(L.RandomGrayscale),
    RandomHue=_picture(L.RandomHue, factor=0.4),
    RandomInvert=_picture(L.RandomInvert, factor=0.5),
    RandomPerspective=_picture(L.RandomPerspective, factor=0.5, scale=0.5),
    RandomPosterization=_picture(L.RandomPosterization, factor=3),
    RandomSaturation=_picture(L.RandomSaturation, factor=0.5),
    RandomSharpness=_picture(L.RandomSharpness, factor=0.5),
    RandomShear=_picture(L.RandomShear, x_factor=0.3, y_factor=0.3),
    RandomTranslation=_picture(L.RandomTranslation, height_factor=0.3, width_factor=0.3),
    Solarization=_picture(L.Solarization, addition_factor=0.3, threshold_factor=0.5),
    RandomZoom=_picture(L.RandomZoom, height_factor=0.3, width_factor=0.3),
)

# Their code mixes in numbers of single precision.
SINGLE_IMAGES = dict(
    AugMix=_picture(L.AugMix),
    RandAugment=_picture(L.RandAugment),
    RandomRotation=_picture(L.RandomRotation, factor=0.3),
)
