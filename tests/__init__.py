from async_opd.models import torchvision_operators

torchvision_operators.install()
