"""The models that the benchmarks train, in plain torch: of images, of text, of pairs, of pixels."""

from gradwire_bench.nets.byte import ByteGPT, ByteNet
from gradwire_bench.nets.image import VGG16, AlexNet, ConvNet, ResNet9, ResNet20
from gradwire_bench.nets.pair import NeuMF
from gradwire_bench.nets.pixel import UNet

__all__ = ["VGG16", "AlexNet", "ByteGPT", "ByteNet", "ConvNet", "NeuMF", "ResNet9", "ResNet20", "UNet"]
